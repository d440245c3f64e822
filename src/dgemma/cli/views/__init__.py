"""What the commands show: terminal views, progress bars and tables."""
