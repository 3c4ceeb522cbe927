"""Words that tasks are made of. Their order is part of what a seed means: add at the end."""

import random

__all__ = ["FIRST_NAMES", "KEYS", "LAST_NAMES", "TOWNS", "TRADES", "keys", "numbers", "uuids"]


def _cut(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_ADJECTIVES = _cut("""
    amber ancient bitter blazing brave bright broken calm careful cheerful clever cloudy cold copper crimson
    curious dapper distant dusty eager early elegant faded faint famous fearless fierce frozen gentle giant golden
    graceful green hidden hollow honest humble icy idle ivory jolly keen lively lonely loud lucky marble mellow
    mighty modern narrow noble obscure olive patient polite proud quick quiet rapid rustic scarlet secret silent
    silver sleepy solemn
""")

_NOUNS = _cut("""
    acorn anchor anvil arrow badger banner barrel beacon bell bridge bucket button candle canyon castle cello
    chimney clover comet compass cottage cradle dagger dolphin falcon feather fiddle flute forest fountain garden
    glacier hammer harbor hornet island jacket kettle ladder lantern ledger lemon lighthouse locket magnet mango
    meadow mirror mitten monkey needle orchard otter paddle parrot pebble pepper pillow planet pocket puzzle
    rabbit ribbon river
""")

FIRST_NAMES = _cut("""
    Ada Bruno Carla Dario Edda Felix Greta Hugo Ines Jonas Klara Leo Mara Nils Olga Pavel Rosa Sven Tilda Umar
    Vera Walter Xenia Yusuf Zelda Anton Berta Cyril Doris Emil Flora Gustav Hanna Igor Julia Karl
""")

LAST_NAMES = _cut("""
    Abbott Barlow Castell Dunmore Ellery Farrow Galloway Hartwell Ibsen Jarvis Kestrel Lockwood Merton Norwood
    Oakley Pemberton Quill Radcliffe Selwyn Thornton Underhill Vickers Winslow Yardley Ashcroft Bellamy Cromwell
    Driscoll Everett Fairfax Grantham Holloway Ingram Jessop Kirby Langley
""")

TOWNS = _cut("""
    Alderbrook Birchfield Cedarholm Dunwick Eastmere Fernley Greystone Hazelton Ironbridge Juniper Kingsford
    Larkspur Millbrook Northgate Oakhurst Pinecrest Queensbury Redcliff Stonehaven Thornbury Upwell Valemont
    Westbrook Yarrow Ashdown Bramley Copperfield Dalewood Elmsworth Foxhollow
""")

TRADES = _cut("""
    baker carpenter clockmaker cook dentist farmer fisher florist gardener glazier jeweller lawyer librarian mason
    miller painter pilot plumber potter sailor shepherd tailor teacher weaver
""")


KEYS = len(_ADJECTIVES) * len(_NOUNS)
"""Different pairs of words."""


def keys(draw: random.Random, count: int) -> list[str]:
    """``count`` different pairs of words, such as ``amber lantern``, at most :data:`KEYS`."""
    return [
        f"{_ADJECTIVES[place // len(_NOUNS)]} {_NOUNS[place % len(_NOUNS)]}"
        for place in draw.sample(range(KEYS), count)
    ]


def numbers(draw: random.Random, count: int) -> list[str]:
    """``count`` different numbers of seven digits."""
    return [str(number) for number in draw.sample(range(1_000_000, 10_000_000), count)]


def uuids(draw: random.Random, count: int) -> list[str]:
    """``count`` random UUIDs, of RFC 9562's shape without its version."""
    drawn = [f"{draw.getrandbits(128):032x}" for _ in range(count)]
    return ["-".join((one[:8], one[8:12], one[12:16], one[16:20], one[20:])) for one in drawn]
