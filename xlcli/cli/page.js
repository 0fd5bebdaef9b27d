"use strict";
// A block has in data-t, for each token in order: its length, or (length:bytes), and its bits, in digits of base 64.
const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const UNIT = /(?:([\w-])|\((\d+):(\d+)\))([\w-])([\w-])/g;
const BITS_STEP = 0.05;
const tip = document.getElementById("tip");
const utf8 = new TextEncoder();
const painted = new Set();

function paint(block) {
  if (painted.has(block)) return;
  painted.add(block);
  const units = block.dataset.t.matchAll(UNIT);
  let byte = Number(block.dataset.o);
  for (const row of block.children) {
    const text = row.textContent;
    const tokens = [];
    for (let at = 0; at < text.length; ) {
      const [, short, length, bytes, high, low] = units.next().value;
      const end = at + (short ? DIGITS.indexOf(short) : Number(length));
      const token = document.createElement("i");
      token.textContent = text.slice(at, end);
      token.byte = byte;
      token.bytes = short ? utf8.encode(token.textContent).length : Number(bytes);
      token.bits = BITS_STEP * (64 * DIGITS.indexOf(high) + DIGITS.indexOf(low));
      token.className = "c" + Math.min(7, Math.floor(token.bits / Math.max(1, token.bytes)));
      tokens.push(token);
      byte += token.bytes;
      at = end;
    }
    row.replaceChildren(...tokens);
  }
}

function clear(block) {
  if (!painted.has(block) || !getSelection().isCollapsed) return;
  painted.delete(block);
  for (const row of block.children) row.textContent = row.textContent;
}

const observer = new IntersectionObserver(
  (entries) => entries.forEach((entry) => (entry.isIntersecting ? paint : clear)(entry.target)),
  { rootMargin: "100%" },
);
document.querySelectorAll("pre").forEach((block) => observer.observe(block));

function show(event) {
  const token = event.target.closest?.("pre i");
  tip.hidden = token?.bits === undefined;
  if (tip.hidden) return;
  const size = token.bytes === 1 ? "1 byte" : token.bytes + " bytes";
  tip.textContent = `${token.bits.toFixed(1)} bits in ${size}, at byte ${token.byte.toLocaleString("en")}`;
  const box = token.getClientRects()[0];
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 4);
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = (box.top > tip.offsetHeight + 60 ? box.top - tip.offsetHeight - 4 : box.bottom + 4) + "px";
}
document.addEventListener("pointerover", show);
document.addEventListener("scroll", () => (tip.hidden = true), { passive: true });
