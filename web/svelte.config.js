// Runes everywhere; no preprocessor is needed for type annotations.
export default { compilerOptions: { runes: true } };
