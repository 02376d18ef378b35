"""JSON Schema's formats of strings as regular expressions, for texts without quotes. In JSON, llguidance has its own.

Each is what the format's standard allows or less, never more. Less: addresses without quotes or comments, URIs with a
host name or a path after the scheme and no numeric hosts, seconds below 60, years from 0001.
"""

from __future__ import annotations

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26]|0[48])00)"
_LONG, _SHORT = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])", "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_DATE = f"({_YEAR}-({_LONG}|{_SHORT}|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
_HOURS = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOURS})"
_CLOCK = "([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_WORD = r"[A-Za-z0-9!#$%&'*+\/=?^_`{|}~-]{1,16}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"({_BYTE}\.){{3}}{_BYTE}"
_H = "[0-9A-Fa-f]{1,4}"
# Some groups, then `::` for at least one, then the rest.
_SHORTENED = "|".join(
    f"({_H}(:{_H}){{{left - 1}}})?::({_H}(:{_H}){{0,{6 - left}}})?" if left else f"::({_H}(:{_H}){{0,6}})?"
    for left in range(7)
)
_IPV6 = f"(({_H}:){{7}}{_H}|{_SHORTENED}|({_H}:){{7}}:)"
_PATH = r"([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(\/\/{_HOST}(:[0-9]{{1,5}})?(\/{_PATH}*)*|{_PATH}+(\/{_PATH}*)*)"
_MORE = rf"(({_PATH}|[\/?])*)"

REGEXES: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DAYS}(T{_CLOCK})?|T{_CLOCK}|[0-9]+W)",
    "email": rf"{_WORD}(\.{_WORD}){{0,3}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"{_URI}(\?{_MORE})?(#{_MORE})?",
}
