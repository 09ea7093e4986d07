"""What a run settles before it starts: flags, folder, memory, cluster, preflight."""
