"""The words that made-up conversations are of."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

__all__ = ["FIRST_NAMES", "NOUNS", "PLACES", "VERBS", "dictionary"]

NOUNS = """order amount price city customer item quantity reason date status room name id code user email phone street
country weight size color title author book page table seat ticket flight train hotel guest night day hour minute week
month year account balance invoice payment card number total fee tax discount product stock store shelf box parcel
tracking address zip file folder path line column row key value label tag level score rank team player game move guess
answer question query text message subject topic note comment task project owner priority deadline state region river
mountain animal plant food drink recipe dish song artist album movie film channel device sensor reading temperature
speed distance height width depth length angle start end source target origin destination sender receiver doctor
patient ward drug dose course teacher student class grade exam letter word digit sum difference product ratio count
limit rate unit currency bank branch loan term risk claim policy agent client vendor supplier contract lease flat
house door window lock pin password token host port server region zone bucket job queue worker event kind type mode
option choice result report chart cell sheet field record entry node edge graph map marker point place area
site""".split()
"""The names of values and of what tools work on."""
VERBS = """get find look fetch read open check list search show make create add put set update change move send post
write book buy sell pay refund cancel return close delete remove drop start stop run call ask tell answer guess submit
report count sum compare convert measure order reserve assign accept reject approve deny ship pack load save store
lock unlock turn press take give use eat go visit travel plan note mark label tag sort filter pick choose play finish
end""".split()
"""What tools do."""
FIRST_NAMES = """Ann Bob Carla Dmitri Eve Farid Greta Hugo Ines Jan Kofi Lena Mira Noor Olga Paul Quinn Rosa Sam Tara
Umar Vera Wen Xenia Yuki Zoe Ada Ben Chloe Dan Emil Fay Gus Hana Ivan Joy Karl Lou Max Nina""".split()
PLACES = """Oslo Rome Lima Cairo Delhi Tokyo Paris Berlin Quito Accra Hanoi Perth Miami Dakar Sofia Riga Turin Porto
Lyon Bern Kyoto Osaka Seoul Lagos Tunis Sydney Boston Denver""".split()


@cache
def dictionary() -> tuple[str, ...]:
    """Returns English words of three to nine letters: of the games' lists, and of the texts of Python's own help."""
    from pydoc_data import topics

    texts = [files("agentgym.envs").joinpath("data", name).read_text() for name in ("wordle.txt", "word_ladder.txt")]
    return tuple(sorted(set(re.findall(r"\b[a-z]{3,9}\b", " ".join((*topics.topics.values(), *texts))))))
