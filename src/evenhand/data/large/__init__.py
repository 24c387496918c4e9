"""Data that are slow to read or do not fit: worker processes that read ahead, and files mapped into memory."""
