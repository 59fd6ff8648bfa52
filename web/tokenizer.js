"use strict";
// Byte-pair encoding with the ranks of a .tiktoken file, as tiktoken does it by data.py's SPLIT_PATTERN.

// data.py's pattern in JavaScript's words: \s there is White_Space, and its (?i:s) finds the long s too. What its
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
      if (tokens.length + more.length <= most) letters += piece.length;
      for (const token of more.slice(0, most - tokens.length)) tokens.push(token);
      if (tokens.length >= most) break;
    }
    return { tokens, letters };
  }

  // Again and again, join the two neighbours whose joined rank is lowest, the leftmost ones first. One pass joins all of
  // that rank, unless it makes neighbours of a lower one: these come first.
  merge(letters) {
    if (this.ranks.has(letters)) return [this.ranks.get(letters)];
    const rank = (a, b) => this.ranks.get(a + b) ?? Infinity, lowest = (all) => all.reduce((a, b) => Math.min(a, b), Infinity);
    let parts = [...letters], joined = parts.slice(1).map((part, i) => rank(parts[i], part));  // of parts i and i + 1
    for (let best; (best = lowest(joined)) < Infinity;) {
      const next = [], ranks = [];
      let lower = false, made = false;                                   // made: the last of next is two parts
      for (let i = 0; i < parts.length; i++) {
        const join = !lower && joined[i] === best, part = join ? parts[i] + parts[++i] : parts[i];
        if (next.length) ranks.push(join || made ? rank(next.at(-1), part) : joined[i - 1]);
        if (join) lower = ranks.at(-1) < best || (i + 1 < parts.length && rank(part, parts[i + 1]) < best);
        next.push(part);
        made = join;
      }
      [parts, joined] = [next, ranks];
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
