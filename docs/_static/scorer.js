// How the search of the site orders what it finds: guides and questions before long pages of results.
// Sphinx declares these names by var again, if they are not there.
var FACTORS = [
  [/^(index|faq|tutorial|how_to\/|explanation\/)/, 3],
  [/^(changelog|contributing|gallery|results\/)/, 0.3],
];

var Scorer = {
  score: ([page, title, anchor, description, score]) =>
    FACTORS.reduce((sum, [pages, factor]) => (pages.test(page) ? factor * sum : sum), score),
  // The values of Sphinx.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
