"""The executor ``threads``, by a third party."""
