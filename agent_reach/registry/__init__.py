"""Where instances are announced and found."""
