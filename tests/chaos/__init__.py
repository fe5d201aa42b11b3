"""A pool of real processes under attack, and a record of what it has confirmed, kept apart from it."""
