"use strict";
// A block has in data-t, for each word in order: its length, or (length:bytes), and its bits, in digits of base 64.
const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const UNIT = /(?:([\w-])|\((\d+):(\d+)\))([\w-])([\w-])/g;
const BITS_STEP = 0.05;
const BINS_PER_OCTAVE = 8;
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
    const words = [];
    for (let at = 0; at < text.length; ) {
      const [, short, length, bytes, high, low] = units.next().value;
      const end = at + (short ? DIGITS.indexOf(short) : Number(length));
      const whole = text.slice(at, end);
      const shown = whole.trimStart();
      const word = document.createElement("i");
      word.textContent = shown;
      word.byte = byte;
      word.bytes = short ? utf8.encode(whole).length : Number(bytes);
      word.bits = BITS_STEP * (64 * DIGITS.indexOf(high) + DIGITS.indexOf(low));
      if (shown) word.className = "w" + Math.floor(BINS_PER_OCTAVE * Math.log2(1 + word.bits));
      words.push(whole.slice(0, whole.length - shown.length), word);
      byte += word.bytes;
      at = end;
    }
    row.replaceChildren(...words);
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
  const word = event.target.closest?.("pre i");
  tip.hidden = word?.bits === undefined;
  if (tip.hidden) return;
  const size = word.bytes === 1 ? "1 byte" : word.bytes + " bytes";
  tip.textContent = `${word.bits.toFixed(1)} bits in ${size}, at byte ${word.byte.toLocaleString("en")}`;
  const box = word.getClientRects()[0];
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 4);
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = (box.top > tip.offsetHeight + 60 ? box.top - tip.offsetHeight - 4 : box.bottom + 4) + "px";
}
document.addEventListener("pointerover", show);
document.addEventListener("scroll", () => (tip.hidden = true), { passive: true });
