"""The Jupyter server extension: what the sidebar talks to.

    app         the extension and its settings
    link        the way to the pool: found, lost, found again
    looks       reads that serve many browser tabs at once
    handlers    the endpoints; problems: how they say no
    dashboards  the Dask dashboards of one's leases; tickets: who may open which
    news        what the pool tells, on Jupyter's event bus

Rule 1: it knows no rule of the pool: it asks, as the person whose token it holds, and passes the answer on.
Rule 2: loading it costs little, and it works where no pool can be reached: that is a state with a reason.
"""
