"""What all experiments share. Import the modules; the package itself imports nothing."""
