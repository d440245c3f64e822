"""The words that messages are made of. Each belongs to training or to what is held out, by its hash."""

from __future__ import annotations

import json
import random
from hashlib import sha256
from pathlib import Path

_LISTS = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
COUNTRIES: dict[str, str] = _LISTS["countries"]
CITIES: list[tuple[str, str]] = [(name, country) for name, country in _LISTS["cities"]]
FIRST_NAMES: list[str] = _LISTS["first_names"]
LAST_NAMES: list[str] = _LISTS["last_names"]
THINGS: list[str] = _LISTS["things"]
QUALITIES_OF_ALL: list[str] = _LISTS["qualities"]
DONE: list[str] = _LISTS["done"]

TITLES = (
    "lunch", "dinner", "breakfast", "dentist", "haircut", "interview", "team meeting", "budget review",
    "yoga class", "piano lesson", "car inspection", "design review", "project kickoff", "parents' evening",
    "book club", "planning session", "status call", "phone call", "coffee", "board meeting", "training",
    "workshop", "eye test", "physiotherapy", "vaccination", "house viewing", "tennis match",
    "choir practice", "code review", "sales pitch", "film night", "birthday party", "garden party",
    "sprint review", "retrospective", "one-on-one", "check-up", "oil change", "driving lesson",
    "language class", "site visit", "product demo", "press briefing", "photo shoot", "boat trip",
    "museum tour", "chess game", "running group", "swimming lesson", "salary talk", "lab visit",
    "tax meeting", "contract signing", "roof repair", "window cleaning", "rehearsal", "concert", "seminar",
    "audit", "staff meeting", "customer call", "security briefing", "fire drill", "poetry reading",
    "cooking class",
)  # fmt: skip
# With a thing before them, or after: what no list can hold.
TITLE_KINDS = (
    "repair", "class", "meeting", "visit", "lesson", "check", "delivery", "tour", "talk", "exam", "test",
    "party", "show", "course", "sale",
)  # fmt: skip
QUALITIES = ("red", "small", "large", "wooden", "steel", "used", "black", "round", "cheap", "blue", "plastic")
FAULT_KINDS = (
    "is missing", "failed", "was removed", "not ready", "timed out", "is full", "is broken", "restarted",
    "was replaced", "not found",
)  # fmt: skip
PLACES = (
    "the library", "the town hall", "the station", "the main office", "the old bakery", "the harbour",
    "the clinic", "the city park", "the sports hall", "the canteen", "the blue room", "the garage",
    "the corner cafe", "the museum", "the swimming pool", "the west gate", "the church",
    "the market square", "the boathouse", "the opera", "the airport", "the school", "the brewery",
    "the law firm", "the warehouse", "the theatre", "the castle", "the golf club", "the hospital",
    "the bookshop", "the lake house", "the embassy", "the zoo", "the north tower",
)  # fmt: skip
ITEMS = (
    "desk lamp", "notebook", "keyboard", "office chair", "water bottle", "phone case", "garden hose",
    "coffee mug", "backpack", "screwdriver", "paint roller", "wall clock", "bookshelf", "umbrella",
    "bath towel", "frying pan", "cutting board", "table cloth", "bicycle pump", "tent", "sleeping bag",
    "camping stove", "usb cable", "mouse pad", "monitor stand", "headset", "webcam", "printer",
    "ink cartridge", "stapler", "folder", "whiteboard", "marker", "flower pot", "watering can", "hammer",
    "toolbox", "ladder", "light bulb", "extension cord", "door mat", "mirror", "pillow", "blanket",
    "curtain", "rug", "candle", "picture frame", "vase", "teapot", "soup bowl", "wine glass", "salad fork",
    "apron", "oven glove", "baking tray", "rolling pin", "measuring cup", "spice jar", "lunch box",
    "pencil case", "ruler", "calculator", "globe", "puzzle", "board game", "football", "tennis racket",
    "yoga mat", "jump rope", "helmet", "bell", "lock", "travel mug", "suitcase", "wallet", "belt", "scarf",
    "rain jacket",
)  # fmt: skip
SERVICES = (
    "payments", "auth", "search", "billing", "gateway", "scheduler", "mailer", "inventory", "catalog",
    "checkout", "reports", "uploads", "cache", "indexer", "worker", "frontend", "sessions", "orders",
    "shipping", "metrics", "backup", "proxy", "notifier", "importer", "exporter", "profiles", "comments",
    "images", "video", "chatbot", "router", "storage", "queue", "renderer", "translator", "quotas", "sync",
    "webhooks", "archive", "printer",
)  # fmt: skip
FAULTS = (
    "upstream timed out", "connection refused", "disk almost full", "retry succeeded", "token expired",
    "invalid signature", "cache miss rate is high", "user not found", "request too large",
    "started in safe mode", "configuration reloaded", "certificate expires soon", "worker restarted",
    "queue is empty", "slow query", "lock was not released", "checksum mismatch", "permission denied",
    "rate limit reached", "no space left", "heartbeat missed", "schema migrated", "unknown currency",
    "duplicate order", "mail bounced", "index rebuilt", "memory usage is high", "backup finished",
    "replica is behind", "session closed", "file is locked", "name not resolved", "job was cancelled",
    "input is empty", "limit was raised", "version is outdated",
)  # fmt: skip
STREETS = (
    "Oak", "Mill", "Church", "Station", "King", "Queen", "High", "Park", "Garden", "Bridge", "River",
    "Hill", "Lake", "Forest", "School", "Market", "Castle", "Maple", "Cedar", "Elm", "Pine", "Willow",
    "Chestnut", "Orchard", "Spring", "Meadow", "Abbey", "Harbour", "Canal", "Tower", "Windmill", "Rose",
    "Victoria", "Albert", "Union", "Liberty", "Baker", "Fisher", "Weaver", "Cooper", "Quarry", "Valley",
    "Sunset", "Grove", "Prospect", "Crescent", "Chapel",
)  # fmt: skip
STREET_KINDS = ("Street", "Road", "Lane", "Avenue", "Drive", "Way")
COMPANY_KINDS = (
    "Ltd",
    "GmbH",
    "Inc",
    "and Sons",
    "Logistics",
    "Consulting",
    "Foods",
    "Systems",
    "Media",
    "Partners",
)
COMPANY_STEMS = (
    "Blue Harbor", "Northwind", "Silver Oak", "Red Kite", "Green Valley", "Stone Bridge", "Bright Path",
    "Old Mill", "Clear Water", "High Peak", "Golden Gate", "Iron Works", "Swift River", "Quiet Corner",
    "Open Field", "Black Swan", "White Cliff", "Summit", "Horizon", "Atlas", "Orion", "Nova", "Delta",
    "Vertex", "Pioneer", "Beacon", "Anchor", "Compass", "Lantern", "Falcon", "Heron", "Cobalt", "Amber",
    "Granite", "Juniper", "Saffron", "Tundra", "Zephyr",
)  # fmt: skip

_BEGINS = (
    "b", "bl", "br", "c", "ch", "cl", "cr", "d", "dr", "f", "fl", "fr", "g", "gl", "gr", "h", "j", "k", "l",
    "m", "n", "p", "ph", "pl", "pr", "qu", "r", "s", "sc", "sh", "sk", "sl", "sn", "sp", "st", "str", "t",
    "th", "tr", "v", "w", "wh", "y", "z", "",
)  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ee", "ou", "oo", "ie", "y")
_ENDS = (
    "", "", "", "b", "ck", "d", "ff", "g", "l", "ll", "m", "n", "nd", "ng", "nt", "p", "r", "rd", "rn", "rt",
    "st", "t", "tch", "x", "z",
)  # fmt: skip


def made_up(draw: random.Random) -> str:
    """A word that does not exist, of one to three syllables."""
    while True:
        parts = [
            f"{draw.choice(_BEGINS)}{draw.choice(_VOWELS)}{draw.choice(_ENDS)}"
            for _ in range(draw.choice((1, 2, 2, 3)))
        ]
        if 3 <= len(word := "".join(parts)) <= 11:
            return word


def is_held_out(*words: str) -> bool:
    """An eighth of all words, or pairs of them, always the same."""
    return sha256("\0".join(words).encode()).digest()[0] < 32
