"""An HTTP server with an OpenAI-style API for one prepared model (extra ``serve``)."""
