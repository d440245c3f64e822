-- Runs what $DGEMMA_TEST names in a headless Neovim, and writes what came of it to the file it names.

local given = vim.json.decode(vim.env.DGEMMA_TEST)
local said = {}
vim.notify = function(what)
  said[#said + 1] = what
end

local function lines()
  return vim.api.nvim_buf_get_lines(0, 0, -1, false)
end

local works, reason = pcall(function()
  require("dgemma").setup(given.setup)
  vim.api.nvim_buf_set_lines(0, 0, -1, false, given.lines)
  vim.cmd("set undolevels=" .. vim.o.undolevels) -- what is undone begins here
  if given.cursor then
    vim.api.nvim_win_set_cursor(0, given.cursor)
  end
  for _, command in ipairs(given.commands) do
    vim.cmd(command)
  end
end)
local http = require("dgemma.http")
local returned_at_once = http.is_running()
local ended = vim.wait(100000, function()
  return not http.is_running()
end, 5)

local found = {
  works = works,
  reason = works and "" or reason,
  returned_at_once = returned_at_once,
  ended = ended,
  lines = lines(),
  cursor = vim.api.nvim_win_get_cursor(0),
  said = said,
}
if table.concat(found.lines, "\n") ~= table.concat(given.lines, "\n") then
  vim.cmd("silent undo")
end
found.undone = lines()
vim.fn.writefile({ vim.json.encode(found) }, given.out)
vim.cmd("qall!")
