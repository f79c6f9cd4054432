"""Text to tokens and back: tokenizers, incremental detokenizing, stop strings, chat templates."""
