"""GPU faults at random times under steady work: what people compute is right, and nothing is left behind."""
