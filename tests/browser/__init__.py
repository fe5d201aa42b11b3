"""Tests of the sidebar in a real browser; a pytest run of their own: `python -m pytest tests/browser`."""
