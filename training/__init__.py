"""What a run settles before it starts: flags, folder, memory, time, checks of the machines."""
