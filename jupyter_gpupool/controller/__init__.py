"""The controller: the pool as a Dask scheduler, with its HTTP API and its journal."""
