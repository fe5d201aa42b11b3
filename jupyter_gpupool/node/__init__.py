"""A GPU host: agent, reader, launcher, guard."""
