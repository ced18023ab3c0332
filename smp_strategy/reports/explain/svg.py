"""Just enough SVG: elements as text, with everything from outside escaped."""

from html import escape

__all__ = ["element", "svg"]


def element(name: str, *content: str, **attributes: object) -> str:
    """``<name attributes>content</name>``; ``content`` is markup already, attributes are not.

    Underscores in names of attributes stand for hyphens, and one at the end for nothing (``class_``).
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_shown(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{given}>{''.join(content)}</{name}>"


def svg(width: float, height: float, *content: str, label: str) -> str:
    """A drawing that scales with the page."""
    return element(
        "svg",
        *content,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
        style=f"width:100%;min-width:{min(width, 640):g}px",
    )


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
