"use strict";
// Byte-pair encoding with the ranks of a .tiktoken file, as tiktoken does it by tokenizer.py's SPLIT_PATTERN.

// tokenizer.py's pattern in JavaScript's words: \s there is White_Space, and its (?i:s) finds the long s too. What its
// possessive quantifiers would forbid can't happen here: no part can give back what the next one takes.
const SPLIT = new RegExp(
  "'(?:[sdmtSDMT\\u017F]|[lL][lL]|[vV][eE]|[rR][eE])|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}" +
  "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s+$|\\s*[\\r\\n]|\\s+(?!\\S)|\\s"
    .replaceAll("\\s", "\\p{White_Space}").replaceAll("\\S", "\\P{White_Space}"), "gu");

// A lone half of a character becomes U+FFFD, as in tiktoken.
const wellFormed = (text) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(new TextEncoder().encode(text));
const lettersOf = (bytes) => Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");        // a byte a letter

class Tokenizer {
  constructor(file) {
    this.tokens = [];                                                    // by rank: its bytes, a letter each
    for (const line of file.trim().split("\n")) {
      const [token, rank] = line.split(" ");
      this.tokens[Number(rank)] = atob(token);
    }
    this.ranks = new Map(this.tokens.map((token, rank) => [token, rank]));
    this.eot = this.tokens.length;                                       // <|endoftext|> comes after all of them
  }

  // The ranks of a text, without <|endoftext|>: a text that spells it is read as any other.
  encode(text) {
    return this.begin(text, Infinity).tokens;
  }

  // The first tokens of a text, at most so many, and how many of its characters they are.
  begin(text, most) {
    const tokens = [], bytes = new TextEncoder();
    let letters = 0;
    for (const [piece] of wellFormed(text).matchAll(SPLIT)) {
      const more = this.merge(lettersOf(bytes.encode(piece)));
      const kept = more.slice(0, most - tokens.length);
      letters += kept.length === more.length ? piece.length : this.text(kept).replace(/\uFFFD+$/, "").length;
      for (const token of kept) tokens.push(token);
      if (tokens.length >= most) break;
    }
    return { tokens, letters };
  }

  // Again and again, join the two neighbours whose joined rank is lowest, the leftmost ones first. A long word has many
  // pairs, so each is noted under its rank when its parts come to lie side by side.
  merge(letters) {
    if (this.ranks.has(letters)) return [this.ranks.get(letters)];
    const parts = [...letters], next = parts.map((_, i) => i + 1), last = parts.map((_, i) => i - 1), places = [];
    const rank = (i) => (next[i] < parts.length ? this.ranks.get(parts[i] + parts[next[i]]) : undefined);
    let lowest = 0;
    const note = (i) => {
      const joined = rank(i);
      if (joined === undefined) return;
      (places[joined] ??= []).push(i);
      lowest = Math.min(lowest, joined);
    };
    parts.forEach((_, i) => note(i));
    while (lowest < places.length) {
      const now = lowest, found = (places[now] ?? []).sort((a, b) => a - b);
      let done = 0;
      while (done < found.length && lowest === now) {
        const i = found[done++], j = next[i];
        if (parts[i] === null || rank(i) !== now) continue;              // one of the two was joined to another
        parts[i] += parts[j];
        parts[j] = null;
        next[i] = next[j];
        last[next[j]] = i;
        note(i);
        if (last[i] >= 0) note(last[i]);
      }
      places[now] = found.slice(done);                                   // some are left if a lower rank came up
      if (lowest === now) lowest++;
    }
    return parts.filter((part) => part !== null).map((part) => this.ranks.get(part));
  }

  // The text of tokens, in which bytes that are no characters become replacement characters.
  text(tokens) {
    const letters = tokens.map((token) => this.tokens[token] ?? "").join("");
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(letters, (letter) => letter.charCodeAt(0)));
  }

  // A token for the eye: text, or the bytes of a part of a character.
  show(token) {
    if (token === this.eot) return "<|endoftext|>";
    const bytes = Uint8Array.from(this.tokens[token], (letter) => letter.charCodeAt(0));
    try {
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    } catch {
      return [...bytes].map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
    }
  }
}
