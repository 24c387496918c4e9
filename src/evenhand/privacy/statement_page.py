"""The statement as one page to print and sign: A4 or Letter, one file, nothing loaded, every name inert."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evenhand.accounting.owner_classes import in_words, span, summary
from evenhand.privacy.statement import (
    OWNERS_SHOWN,
    further_owners,
    promise,
    public_counts,
    rounded_up,
    runs_words,
    stop_words,
)

NAMES_SHOWN, NAME_LENGTH = 12, 60
STYLE = """
@page{margin:10mm 12mm}
:root{color-scheme:light;--ink:#1d2329;--soft:#57606a;--rule:#cfd5db;--tint:#f3f5f7;--warn:#fdf1e3;--strong:#b94a00}
*{box-sizing:border-box}
body{margin:0;background:#fff;color:var(--ink);font:7.6pt/1.3 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere;print-color-adjust:exact;-webkit-print-color-adjust:exact}
main{max-width:190mm;margin:0 auto}
header{display:flex;justify-content:space-between;align-items:baseline;border-bottom:1.5pt solid var(--ink);
padding-bottom:3pt;gap:12pt}
h1{font-size:15pt;line-height:1.2;margin:0;letter-spacing:-.01em}
h2{font-size:1.05em;margin:0 0 2pt}
p{margin:0 0 3pt}
ul{margin:0;padding-left:11pt}
header p,.soft{color:var(--soft);margin:0}
.promise{background:var(--tint);padding:6pt 9pt;margin:6pt 0;font-size:1.11em}
.promise p{margin:0}
.figures{display:flex;flex-wrap:wrap;gap:2pt 14pt;margin:0 0 3pt}
.figures div{display:flex;gap:5pt;align-items:baseline}
.figures dt{color:var(--soft)}
.figures dd{margin:0;font-weight:600;font-size:1.09em;font-variant-numeric:tabular-nums}
.none{background:var(--warn);border-left:3pt solid var(--strong)}
.warn{background:var(--warn);border-left:3pt solid var(--strong);padding:4pt 8pt;margin:0 0 7pt}
.two{columns:2;column-gap:16pt}
section{break-inside:avoid;margin:0 0 6pt}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;margin:0 0 6pt}
th,td{text-align:left;vertical-align:top;padding:1pt 8pt 1pt 0;border-bottom:.5pt solid var(--rule)}
th{font-weight:500;color:var(--soft)}
tr{break-inside:avoid}
.owners td+td,.owners th+th{text-align:right;overflow-wrap:normal}
.owners td:last-child,.owners th:last-child{padding-right:0}
.facts th{width:25%}
.hashes{margin-top:6pt}
.hashes th{width:20%}
.hashes th,.hashes td{padding:.2pt 8pt .2pt 0;border:0}
code{font:7pt/1.3 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
.sign{display:grid;grid-template-columns:2fr 1fr;gap:16pt;margin-top:4pt;break-inside:avoid}
.sign div{border-top:.8pt solid var(--ink);padding-top:2pt;margin-top:18pt}
footer{color:var(--soft);font-size:7.4pt;margin-top:5pt}
@media screen{main{padding:11mm 0}}
@media screen and (max-width:210mm){main{padding:16px}}
@media screen and (max-width:640px){body{font-size:14px}.two{columns:1}header{display:block}code{font-size:11px}}
""".strip()
_HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ud800-\udfff]")


def page(statement: Mapping[str, Any]) -> str:
    """The page of one statement. It runs no script, loads nothing and sends nothing."""
    body = [
        f"<header><h1>Privacy statement</h1><p>{_text(statement['mechanism']['method'])}, "
        f"{statement['public_inputs']['records']} training records</p></header>",
        _guarantee(statement),
        _warnings(statement["warnings"]),
        _owners(statement),
        f'<div class="two">{_left(statement)}{_right(statement)}</div>',
        _hashes(statement),
        '<div class="sign"><div>Signed by</div><div>Date</div></div>',
        "<footer>Check it: <code>evenhand verify</code> on the run folder recomputes every figure from the ledger, "
        "without the data. This page is one file; it loads nothing and sends nothing.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="referrer" content="no-referrer"><meta name="generator" content="evenhand">'
        f"<title>Privacy statement {statement['digest'][:16]}</title><style>{STYLE}</style></head>\n<body><main>"
        + "\n".join(filter(None, body))
        + "</main></body></html>\n"
    )


def policy() -> str:
    """The content policy: this one style sheet by its hash, and nothing else.

    Examples:
      >>> policy().split("; ")[0], "script" in policy()
      ("default-src 'none'", False)
    """
    style = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; form-action 'none'"


def _text(value: object, limit: int | None = None) -> str:
    """Text that can be nothing but text: escaped, and without characters that break or reorder a line."""
    clean = _HARMFUL.sub("\ufffd", str(value))
    return html.escape(clean if limit is None or len(clean) <= limit else clean[: limit - 1] + "\u2026")


def _guarantee(statement: Mapping[str, Any]) -> str:
    guarantee = statement["guarantee"]
    if guarantee["epsilon"] is None:
        return f'<div class="promise none"><p>{_text(promise(statement))}</p></div>'
    figures = {
        "epsilon": rounded_up(guarantee["epsilon"]),
        "delta": f"{guarantee['delta']:g}",
        "unit": guarantee["unit"],
        "adjacency": guarantee["adjacency"],
        "guarantee": guarantee["level"],
    }
    shown = "".join(f"<div><dt>{name}</dt><dd>{_text(value)}</dd></div>" for name, value in figures.items())
    said = " ".join([promise(statement), *stop_words(statement["mechanism"])])
    return f'<div class="promise"><dl class="figures">{shown}</dl><p>{_text(said)}</p></div>'


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    return f'<div class="warn"><h2>Look at this before signing</h2>{_listed(warnings)}</div>'


def _owners(statement: Mapping[str, Any]) -> str:
    """A line per owner class, if any epsilon is established."""
    owners, guarantee = statement["owners"], statement["guarantee"]
    if guarantee["epsilon"] is None:
        return ""
    rows = "".join(
        f"<tr><td>{_text(row['name'], NAME_LENGTH)}</td><td>{row['records']}</td>"
        f"<td>{'nothing' if row['budget'] is None else format(row['budget'], 'g')}</td>"
        f"<td>{rounded_up(row['epsilon'])}</td><td>{row['rate']:.3g}</td><td>{span(row.get('bound'))}</td>"
        f"<td>{span(row.get('noise_multiplier'))}</td></tr>"
        for row in owners[:OWNERS_SHOWN]
    )
    further = further_owners(owners)
    further += ["; ".join(in_words(summary(owners))) + "."] if further else []
    more = "".join(f"<p>{_text(sentence)}</p>" for sentence in further)
    return (
        '<table class="owners"><thead><tr><th>Each record of owner</th><th>Records</th><th>Promised epsilon</th>'
        f"<th>Epsilon, at delta {guarantee['delta']:g}, {_text(guarantee['adjacency'])} "
        f"{_text(guarantee['unit'])}</th><th>Rate</th><th>Clip bound</th><th>Noise multiplier</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>{more}"
    )


def _left(statement: Mapping[str, Any]) -> str:
    mechanism, accounting = statement["mechanism"], statement["accounting"]
    steps = (
        f"{mechanism['steps_charged']} charged of {mechanism['steps_planned']} planned, "
        f"about {mechanism['expected_batch']:g} records each"
    )
    settings = ", ".join(f"{key} {value}" for key, value in mechanism["rule"]["settings"].items())
    made = {
        "Rule": mechanism["rule"]["name"] + (f" ({settings})" if settings else ""),
        "Steps": steps,
        "Sampling": mechanism["sampling"],
    }
    if statement["guarantee"]["epsilon"] is not None:
        made |= {
            "Noise": f"{_span(mechanism['noise_multiplier'])} times the clip bound {_span(mechanism['clip_bound'])}. "
            + mechanism["noise"],
            "Randomness": mechanism["randomness"],
            "Floats": mechanism["hardened"],
        }
        made["Accountant"] = accounting["accountant"]
    audit = "Not audited yet." if statement["audit"] is None else str(statement["audit"])
    return (
        _section("How the model was made", _facts(made))
        + _section("Other runs on the same data", f"<p>{_text(_runs(statement))}</p>")
        + _section("Public inputs: not protected", _public(statement))
        + _section("Trust and audit", f"<p>{_text(_sentence(statement['trust_model']))} {_text(audit)}</p>")
    )


def _span(pair: Sequence[float]) -> str:
    low, high = pair
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _runs(statement: Mapping[str, Any]) -> str:
    if statement["guarantee"]["epsilon"] is None:
        return "This run has no established guarantee and is in no total."
    return runs_words(statement["accounting"], statement["guarantee"]["delta"])


def _right(statement: Mapping[str, Any]) -> str:
    sharing = statement["sharing"]
    files = (
        f"<p>May be shared: {_text(', '.join(sharing['may_be_shared']))}.</p>"
        f"<p>Must not be shared: {_text(', '.join(sharing['must_not_be_shared']))}.</p>"
    )
    covered = _section("Covered", _listed(statement["covers"])) if statement["covers"] else ""
    return (
        covered
        + _section("Not covered", _listed(statement["does_not_cover"]))
        + _section("Files of the run folder", files)
        + _section("Intermediate checkpoints", f"<p>{_text(_sentence(sharing['intermediate_checkpoints']))}</p>")
    )


def _public(statement: Mapping[str, Any]) -> str:
    inputs, promised = statement["public_inputs"], statement["guarantee"]["epsilon"] is not None
    return _facts(_inputs(inputs)) + (f"<p>{_text(public_counts(inputs))}</p>" if promised else "")


def _inputs(inputs: Mapping[str, Any]) -> dict[str, str]:
    derived = ", ".join(inputs["read_off_the_data"])
    return {
        "Records": f"{inputs['records']} in {len(inputs['owners'])} owner class(es)",
        "Groups": _names(inputs["groups"]),
        "Labels": _names(inputs["labels"]),
        "Inputs": inputs["inputs"] or "not declared",
        "Read off the data": f"{derived}: declare them if they are not public" if derived else "nothing",
    }


def _names(names: Sequence[str]) -> str:
    if not names:
        return "none declared"
    shown = [name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "\u2026" for name in names[:NAMES_SHOWN]]
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(shown) + more


def _hashes(statement: Mapping[str, Any]) -> str:
    rows = {
        "This statement": statement["digest"],
        "Plan": statement["plan"],
        "Ledger head": statement["ledger_head"],
        "Model": statement["model_sha256"] or "not released",
        **statement["files"],
    }
    software = ", ".join(f"{name} {version}" for name, version in statement["software"].items())
    cells = "".join(
        f"<tr><th>{_text(name)}</th><td><code>{_text(value)}</code></td></tr>" for name, value in rows.items()
    )
    cells += f"<tr><th>Written by</th><td>{_text(software)}</td></tr>"
    return f'<section class="hashes"><h2>Hashes (SHA-256)</h2><table><tbody>{cells}</tbody></table></section>'


def _section(heading: str, body: str) -> str:
    return f"<section><h2>{heading}</h2>{body}</section>"


def _facts(rows: Mapping[str, str]) -> str:
    cells = "".join(f"<tr><th>{name}</th><td>{_text(value)}</td></tr>" for name, value in rows.items())
    return f'<table class="facts"><tbody>{cells}</tbody></table>'


def _listed(texts: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(_sentence(text))}</li>" for text in texts) + "</ul>"


def _sentence(text: str) -> str:
    """With a capital and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
