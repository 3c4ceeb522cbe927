"""The model's side: sessions, refiners, the decoder, preparation, evaluation and the command line."""
