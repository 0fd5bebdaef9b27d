"""Model folders and their checkpoints on disk: written atomically, read with suspicion."""
