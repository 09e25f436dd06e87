"""Programs that ``torchrun`` starts, each case on every rank, and the tests that hold what the ranks wrote against each other."""
