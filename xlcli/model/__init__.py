"""The network. `build` makes a `LanguageModel` from a configuration; `lm` is the way in."""
