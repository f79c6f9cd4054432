"""Reading model files without trusting them and without any array library: tables, sizes, metadata."""
