"""What every picture shares: fonts and colours of its page, light and dark, and text that XML can hold."""

from __future__ import annotations

import re
from xml.sax.saxutils import escape

STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#4b5563}
.heading{font-size:19px;font-weight:600;fill:#111827}.title{font-size:14px;font-weight:600;fill:#111827}
.x{text-anchor:middle}.y{text-anchor:end}
path{fill:none;stroke-linejoin:round;stroke-linecap:round}
.page{fill:#fff}.grid{stroke:#e5e7eb}.axis{stroke:#9ca3af}
"""
DARK_STYLE = """
text{fill:#aab2c0}.heading,.title{fill:#f3f4f6}
.page{fill:#0f141b}.grid{stroke:#262d38}.axis{stroke:#5b6472}
"""
# Colours (light page, dark page). Noise levels are an order, and so are their colours.
BLUE, ORANGE, GREY = ("#2563c9", "#74acff"), ("#c2570c", "#ffa057"), ("#6b7280", "#9aa3b2")
GREEN = ("#0f8a6b", "#4fd1a5")
BY_NOISE = (
    ("#1d1a9e", "#7f8cff"),
    ("#8a0fb0", "#bf7cf5"),
    ("#cf3f7d", "#f277a8"),
    ("#ec7a3c", "#ff9f6e"),
    ("#cf9a00", "#ffd54a"),
)


def xml_text(text: str) -> str:
    """For XML, which has no way to write most control characters."""
    return escape(re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text))
