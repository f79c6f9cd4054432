"""Model files, read without trusting them and without an array library: tables, sizes, metadata."""
