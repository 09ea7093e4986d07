"""What any run needs of its machine: devices, processes, command line, files."""
