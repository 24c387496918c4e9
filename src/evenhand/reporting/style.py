"""The one style sheet of the report: calm, at most 900 pixels wide, for screens, phones, dark rooms and paper.

With it the content policy, which lets in this sheet and the one script by their hashes and nothing else.
"""

from __future__ import annotations

import base64
import hashlib

from evenhand.reporting.script import SCRIPT

STYLE = """
:root{color-scheme:light dark;--eh-page:#fff;--ink:#1d2329;--soft:#5a636d;--rule:#dfe3e8;--tint:#f5f7f9;
--eh-strong:#d55e00;--eh-bar:#0072b2;--eh-blue:#0072b2;--eh-green:#009e73;--eh-purple:#cc79a7;--eh-orange:#e69f00;
--eh-sky:#56b4e9;--warn:#fdf3e7}
@media screen and (prefers-color-scheme:dark){:root{--eh-page:#14181c;--ink:#e4e8ec;--soft:#9ca7b2;--rule:#2e363e;
--tint:#1c2228;--eh-strong:#f5803e;--eh-bar:#3f9bd8;--eh-blue:#3f9bd8;--eh-green:#1fbf92;--eh-purple:#dd9cc1;
--eh-orange:#f0b23a;--eh-sky:#8accf2;--warn:#2c2418}}
*{box-sizing:border-box}
body{margin:0;background:var(--eh-page);color:var(--ink);font:17px/1.6 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%;overflow-wrap:anywhere}
main{max-width:900px;margin:0 auto;padding:56px 24px 72px}
h1,h2{line-height:1.25;letter-spacing:-.01em;text-wrap:balance}
h1{font-size:1rem;font-weight:600;color:var(--soft);margin:0 0 12px;letter-spacing:0}
h2{font-size:1.4rem;margin:0 0 10px}
p{margin:0 0 14px;max-width:68ch}
.lead{font-size:1.95rem;line-height:1.28;font-weight:600;letter-spacing:-.015em;margin:0 0 30px;max-width:none;
text-wrap:balance}
section{margin-top:60px}
.note,caption{color:var(--soft);font-size:.9rem}
.note{max-width:78ch;margin:12px 0 0;line-height:1.5}
.alert{background:var(--warn);border-left:4px solid var(--eh-strong);padding:14px 18px;margin:0 0 24px;max-width:none}
.alert p,.alert ul{margin:0}.alert ul{padding-left:20px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(215px,1fr));gap:14px;margin:0}
.cards div{background:var(--tint);border-radius:8px;padding:16px 18px}
.cards dt{color:var(--soft);font-size:.9rem;margin:0}
.cards dd{margin:0}
.cards .big{font-size:1.75rem;font-weight:600;line-height:1.35;font-variant-numeric:tabular-nums}
.cards .big~dd{color:var(--soft);font-size:.9rem;line-height:1.45}
figure{margin:22px 0 0}
figure svg{display:block;width:100%;height:auto;font-variant-numeric:tabular-nums}
.phone{display:none}
details{margin-top:14px}
summary{cursor:pointer;color:var(--soft);font-size:.9rem;width:fit-content}
summary:hover{color:var(--ink)}
table{border-collapse:collapse;width:100%;font-size:.9rem;margin-top:8px;font-variant-numeric:tabular-nums}
caption{text-align:left;padding-bottom:6px}
th,td{padding:7px 0 7px 14px;text-align:right;vertical-align:top;border-bottom:1px solid var(--rule)}
thead th{color:var(--soft);font-weight:500;vertical-align:bottom;overflow-wrap:normal}
th:first-child{text-align:left;padding-left:0;font-weight:500;min-width:5.5rem}
td{white-space:nowrap}
.facts th{width:32%;color:var(--soft)}
.facts td{text-align:left;white-space:normal}
pre{background:var(--tint);border-radius:8px;padding:16px 18px;margin:0;font:.86rem/1.6 ui-monospace,"SF Mono",Menlo,
Consolas,monospace;white-space:pre-wrap}
footer{margin-top:64px;padding-top:16px;border-top:1px solid var(--rule);color:var(--soft);font-size:.85rem}
.choose{display:flex;flex-wrap:wrap;gap:6px;margin:16px 0 0;align-items:center;font-size:.9rem;color:var(--soft)}
.choose[hidden],.tip[hidden]{display:none}
.choose button{font:inherit;font-size:.85rem;color:var(--ink);background:var(--tint);border:1px solid var(--rule);
border-radius:14px;padding:4px 12px;cursor:pointer;max-width:16rem;overflow:hidden;text-overflow:ellipsis;
white-space:nowrap}
.choose button[aria-pressed=false]{background:none;color:var(--soft);text-decoration:line-through}
.choose button:focus-visible{outline:2px solid var(--eh-blue);outline-offset:1px}
svg [data-off]{opacity:.07}
.tip{position:fixed;background:var(--ink);color:var(--eh-page);padding:5px 10px;border-radius:6px;font-size:.85rem;
line-height:1.4;max-width:min(20rem,90vw);pointer-events:none;z-index:9}
.mark{color:var(--eh-strong);font-weight:600}
.wide{overflow-x:auto}
@media (max-width:640px){body{font-size:16px}main{padding:30px 16px 48px}.lead{font-size:1.45rem;margin-bottom:24px}
section{margin-top:46px}h2{font-size:1.22rem}.desk{display:none}.phone{display:block;max-width:440px}
th,td{padding-left:9px}table{font-size:.84rem}
.cards .big{font-size:1.5rem}}
@media print{.choose,.tip{display:none}svg [data-off]{opacity:1}
body{font-size:11pt}main{padding:0;max-width:none}section{margin-top:28pt}figure,.cards div,.alert,tr{
break-inside:avoid}h2,caption{break-after:avoid}summary{list-style:none}
details::details-content{content-visibility:visible;display:block}pre,.cards div{border:1px solid var(--rule)}}
""".strip()


def policy() -> str:
    """The content policy of a page that carries ``STYLE``, runs ``SCRIPT``, and loads, frames and sends nothing.

    Examples:
        >>> policy().split(";")[0]
        "default-src 'none'"
    """
    style, script = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (STYLE, SCRIPT))
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; base-uri 'none'; "
        "form-action 'none'"
    )
