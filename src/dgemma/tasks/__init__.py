"""What a canvas can do and a left-to-right model cannot: fill a gap, edit in place, decide."""
