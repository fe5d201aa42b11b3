"""From asking for one GPU to the first result of `client.submit`, beside a `LocalCluster` in the same run.

    python -m tests.bench.first_result --leases 20

An embedded pool of simulated GPUs is started in a folder of its own. Measured are its cold start (`cold_s`:
pool, first lease and first result, from nothing); leases on the warm pool, one after the other (`p50_s`,
`p95_s`); a lease from a fresh interpreter, imports included, as a notebook's first cell has it
(`fresh_kernel_s`); and in turn with the leases, so that both meet the same load, a `LocalCluster`
with one spawned worker and a client (`localcluster_p50_s`). Every lease has TLS, dashboard and plugins on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

#: What a fresh kernel's first cell does; it prints its time and leaves without the manners of a script's end.
FRESH = """
import time
begun = time.perf_counter()
from jupyter_gpupool import Pool
with Pool(start=False).request(gpus=1, name="fresh") as lease:
    assert lease.client().submit(sum, [20, 22]).result(timeout=60) == 42
    print(time.perf_counter() - begun)
"""


def main() -> None:
    """Run the bench and print its result as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leases", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="5 leases")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gp-") as folder:
        os.environ["GPUPOOL_DIR"] = folder
        for name in ("GPUPOOL_URL", "GPUPOOL_TOKEN", "GPUPOOL_CA"):
            os.environ.pop(name, None)
        from jupyter_gpupool import embedded

        try:
            result = measured(5 if options.quick else options.leases)
        finally:
            embedded.stop()
    print(json.dumps(result))


def measured(leases: int) -> dict[str, float]:
    """Measure all of it on a pool of our own."""
    import distributed  # noqa: F401 - a cold start is measured without the cost of imports, as LocalCluster's is

    from jupyter_gpupool import Pool

    begun = time.perf_counter()
    with Pool() as pool:
        first_result(pool)
        cold = time.perf_counter() - begun
        first_result(pool)
        ours, theirs, failures = [], [], 0
        for _ in range(leases):
            try:
                ours.append(first_result(pool))
            except Exception as error:  # noqa: BLE001 - counted and shown
                failures += 1
                print(f"failed: {error}", file=sys.stderr)
            theirs.append(local_cluster())
        fresh = [fresh_kernel() for _ in range(3)]
    ours = ours or [float("nan")]
    p50, local = statistics.median(ours), statistics.median(theirs)
    return {
        "leases": leases,
        "failures": failures,
        "p50_s": round(p50, 4),
        "p95_s": round(sorted(ours)[int(0.95 * (len(ours) - 1))], 4),
        "localcluster_p50_s": round(local, 4),
        "ratio": round(p50 / local, 4),
        "cold_s": round(cold, 3),
        "fresh_kernel_s": round(statistics.median(fresh), 3),
    }


def first_result(pool) -> float:
    """Return the seconds from asking for one GPU to the first result; then the lease is gone again."""
    begun = time.perf_counter()
    lease = pool.request(gpus=1, timeout=60)
    try:
        assert lease.client().submit(sum, [20, 22]).result(timeout=60) == 42
        return time.perf_counter() - begun
    finally:
        lease.release(wait=30)


def local_cluster() -> float:
    """Return the seconds from nothing to the first result of a `LocalCluster` with one spawned worker."""
    from distributed import Client, LocalCluster

    begun = time.perf_counter()
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        assert client.submit(sum, [20, 22]).result(timeout=60) == 42
        return time.perf_counter() - begun


def fresh_kernel() -> float:
    """Return the seconds that a fresh interpreter needs to the first result, its imports included."""
    said = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120, check=True
    )
    return float(said.stdout.split()[-1])


if __name__ == "__main__":
    main()
