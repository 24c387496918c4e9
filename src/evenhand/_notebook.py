"""Shows objects in a notebook: small tables whose every cell is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

_TABLE = """<div><strong>{{ title }}</strong>
<table><thead><tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in rows %}<tr>{% for cell in row %}<td style="text-align:left">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table>{% for line in notes %}<p>{{ line }}</p>{% endfor %}</div>"""
_FRAME = """<iframe srcdoc="{{ page }}" sandbox="allow-scripts" style="width:100%;height:600px;border:0"></iframe>"""


@lru_cache(maxsize=2)
def _template(text: str) -> Any:
    from jinja2 import Environment

    return Environment(autoescape=True).from_string(text)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], notes: Sequence[str] = ()) -> str:
    """Return a titled table as HTML; whatever a name holds is shown as text.

    Examples:
        >>> "&lt;b&gt;" in table("Plan", ["name"], [["<b>"]])
        True
    """
    return str(_template(_TABLE).render(title=title, columns=columns, rows=rows, notes=notes))


def facts(title: str, values: Mapping[str, object], notes: Sequence[str] = ()) -> str:
    """Return names and values as HTML.

    Examples:
        >>> "<td" in facts("Privacy", {"epsilon": 3.0})
        True
    """
    return table(title, ("", ""), list(values.items()), notes)


def frame(page: str) -> str:
    """Return a whole page as a frame that cannot reach the notebook around it.

    Examples:
        >>> frame('<p title="a">')[:44]
        '<iframe srcdoc="&lt;p title=&#34;a&#34;&gt;"'
    """
    return str(_template(_FRAME).render(page=page))
