"""Model folders, checkpoints and state files: written atomically, verified when read."""
