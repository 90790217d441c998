"""The Hugging Face Hub: repositories, requests that name one, the local cache and uploads. Loads no torch."""
