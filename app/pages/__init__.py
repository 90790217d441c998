"""The pages for browsers, at `/` and below `/ui`: templates over the same services as the API.

Everything works without scripts; htmx loads what changes while a page is open, and figures are drawn from data
embedded in the page.
"""
