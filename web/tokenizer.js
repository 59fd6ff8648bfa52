"use strict";
// Byte-pair encoding with the ranks of a .tiktoken file, as tiktoken does it by data.py's SPLIT_PATTERN.

// data.py's pattern in JavaScript's words: \s there is White_Space, and its (?i:s) finds the long s too. What its
// possessive quantifiers would forbid can't happen here: no part can give back what the next one takes.
const SPLIT = new RegExp(
  "'(?:[sdmtSDMT\\u017F]|[lL][lL]|[vV][eE]|[rR][eE])|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}" +
  "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s+$|\\s*[\\r\\n]|\\s+(?!\\S)|\\s"
    .replaceAll("\\s", "\\p{White_Space}").replaceAll("\\S", "\\P{White_Space}"), "gu");

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
    const bytes = new TextEncoder();
    return (text.toWellFormed().match(SPLIT) ?? []).flatMap((piece) => this.merge(lettersOf(bytes.encode(piece))));
  }

  // The first tokens of a text, at most so many, and how many of its characters they are.
  begin(text, most) {
    const tokens = [], bytes = new TextEncoder();
    let letters = 0;
    for (const [piece] of text.toWellFormed().matchAll(SPLIT)) {
      const more = this.merge(lettersOf(bytes.encode(piece)));
      if (tokens.length + more.length <= most) letters += piece.length;
      tokens.push(...more.slice(0, most - tokens.length));
      if (tokens.length >= most) break;
    }
    return { tokens, letters };
  }

  // Again and again, join the two neighbours whose joined rank is lowest.
  merge(letters) {
    if (this.ranks.has(letters)) return [this.ranks.get(letters)];
    const parts = [...letters], rank = (i) => this.ranks.get(parts[i] + parts[i + 1]) ?? Infinity;
    const joined = parts.slice(1).map((_, i) => rank(i));                // of parts i and i + 1
    while (joined.length) {
      let best = 0;
      for (let i = 1; i < joined.length; i++) if (joined[i] < joined[best]) best = i;
      if (joined[best] === Infinity) break;
      parts.splice(best, 2, parts[best] + parts[best + 1]);
      joined.splice(best, 1);
      if (best > 0) joined[best - 1] = rank(best - 1);
      if (best < joined.length) joined[best] = rank(best);
    }
    return parts.map((part) => this.ranks.get(part));
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
