"""The pages for people, at `/` and below `/ui`: templates over the same services that the API is made of.

Everything works without a script; htmx brings what changes while one looks, and the figures are drawn from data that
stand in the page.
"""
