"""Interface to the machine: devices, processes, command line, files."""
