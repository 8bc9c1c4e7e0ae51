"""Texts that a page paints into canvases, and which of them cover each other.

A canvas keeps no text. So the page's own `fillText` notes where each text was painted, and
forgets it when that part of the canvas is cleared.
"""

from __future__ import annotations

from tests.browser.browser import Browser

_NOTE = """
(() => {
  const kind = CanvasRenderingContext2D.prototype;
  const { fillText, clearRect } = kind;
  const held = (canvas) => (canvas.paintedTexts ??= []);
  kind.fillText = function (text, x, y, ...rest) {
    fillText.call(this, text, x, y, ...rest);
    const m = this.measureText(text);
    const corners = [[x - m.actualBoundingBoxLeft, y - m.actualBoundingBoxAscent],
                     [x + m.actualBoundingBoxRight, y + m.actualBoundingBoxDescent]];
    const t = this.getTransform();
    const [a, b] = corners.map(([u, v]) => t.transformPoint(new DOMPoint(u, v)));
    if (String(text).trim()) held(this.canvas).push({ text: String(text),
      left: Math.min(a.x, b.x), right: Math.max(a.x, b.x),
      top: Math.min(a.y, b.y), bottom: Math.max(a.y, b.y) });
  };
  kind.clearRect = function (x, y, width, height) {
    clearRect.call(this, x, y, width, height);
    const t = this.getTransform();
    const a = t.transformPoint(new DOMPoint(x, y));
    const b = t.transformPoint(new DOMPoint(x + width, y + height));
    this.canvas.paintedTexts = held(this.canvas).filter((e) =>
      e.right < a.x || e.left > b.x || e.bottom < a.y || e.top > b.y);
  };
})();
"""
_COVERED = """
const found = [];
for (const canvas of document.querySelectorAll("canvas")) {
  const texts = canvas.paintedTexts || [];
  for (let i = 0; i < texts.length; i += 1) for (let j = i + 1; j < texts.length; j += 1) {
    const [a, b] = [texts[i], texts[j]];
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 0.5 && high > 0.5) found.push(`${a.text} / ${b.text}`);
  }
}
return found;
"""


def note_labels(browser: Browser) -> str:
    """Note the texts of every page that is opened from now on; returns the key to end it."""
    command = "Page.addScriptToEvaluateOnNewDocument"
    return str(browser.driver.execute_cdp_cmd(command, {"source": _NOTE})["identifier"])


def forget_labels(browser: Browser, key: str) -> None:
    command = "Page.removeScriptToEvaluateOnNewDocument"
    browser.driver.execute_cdp_cmd(command, {"identifier": key})


def covered_labels(browser: Browser) -> list[str]:
    """Pairs of texts of one canvas that cover each other."""
    found = browser.run(_COVERED)
    assert isinstance(found, list)
    return [str(each) for each in found]
