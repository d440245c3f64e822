"""Does another runtime compute the same? Cases, our reference, runners, and where they part."""
