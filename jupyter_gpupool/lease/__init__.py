"""A lease: a Dask cluster of its own."""
