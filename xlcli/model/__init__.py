"""Network. `build.build_model` makes a `LanguageModel` (`lm.py`) from a configuration."""
