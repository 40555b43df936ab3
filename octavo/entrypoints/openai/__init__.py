"""`python -m octavo.entrypoints.openai.api_server` is `octavo serve`."""
