"""What this machine's device and links take: timed calls, as rows that the planner fits."""
