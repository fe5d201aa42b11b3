"""The boundary to NVML, real or simulated."""
