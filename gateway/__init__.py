"""HTTP, tokenization, chat templates and streaming: everything that knows text. Never imports torch."""
