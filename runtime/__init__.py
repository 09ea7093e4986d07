"""Interface to the machine: device, precision, compiler, FLOPs, processes, command line, files."""
