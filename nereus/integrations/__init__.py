"""Settings and checkpoints of other trainers, read and written: verl and OpenRLHF."""
