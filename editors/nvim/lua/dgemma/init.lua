-- Fills gaps and edits lines with a server of dgemma.

local http = require("dgemma.http")
local text = require("dgemma.text")

local M = {}

local options = {
  url = "http://127.0.0.1:8000",
  key = "", -- of `dgemma serve --api-key-file`
  model = "dgemma", -- the served name
  max_tokens = 40, -- of one gap
  before = 4000, -- bytes that are sent of the text before a gap
  after = 1000,
  region = 16000, -- most bytes of the lines of one edit
  timeout_s = 60,
}

local function say(what, level)
  vim.notify("dgemma: " .. what, level or vim.log.levels.ERROR)
end

function M.setup(given)
  for name, value in pairs(given or {}) do
    local default = options[name]
    if default == nil then
      local names = vim.tbl_keys(options)
      table.sort(names)
      error(("dgemma.setup: there is no option %s; options are %s"):format(name, table.concat(names, ", ")), 0)
    end
    if type(value) ~= type(default) then
      error(("dgemma.setup: %s is a %s; it must be a %s"):format(name, type(value), type(default)), 0)
    end
    if type(value) == "string" and value:find("%c") then
      error(("dgemma.setup: %s has a control character; remove it"):format(name), 0)
    end
    if type(value) == "number" and (value < 0 or value % 1 ~= 0) then
      error(("dgemma.setup: %s is %s; it must be a whole number from 0 on"):format(name, value), 0)
    end
  end
  if given and given.url and not given.url:find("^https?://") then
    error(("dgemma.setup: url is %s; it must begin with http:// or https://"):format(given.url), 0)
  end
  options = vim.tbl_extend("force", options, given or {})
end

--- What an answer will be put into: a buffer as it is now.
local function snapshot()
  local buffer = vim.api.nvim_get_current_buf()
  if not vim.bo[buffer].modifiable then
    say("this buffer cannot be changed")
    return nil
  end
  local lines = vim.api.nvim_buf_get_lines(buffer, 0, -1, false)
  return {
    buffer = buffer,
    tick = vim.api.nvim_buf_get_changedtick(buffer),
    text = table.concat(lines, "\n"),
  }
end

--- Replace bytes `from` to `to` at once, so that one undo takes it back; nothing if the user has typed since.
local function replace(before, from, to, new)
  local buffer = before.buffer
  if not vim.api.nvim_buf_is_loaded(buffer) or vim.api.nvim_buf_get_changedtick(buffer) ~= before.tick then
    return say("the text was changed in the meantime; the answer is dropped", vim.log.levels.WARN)
  end
  local row, column = text.position(before.text, from)
  local last_row, last_column = text.position(before.text, to)
  vim.api.nvim_buf_set_text(buffer, row, column, last_row, last_column, vim.split(new, "\n", { plain = true }))
  if vim.api.nvim_get_current_buf() == buffer then
    local end_row, end_column = text.position(before.text:sub(1, from) .. new, from + #new)
    vim.api.nvim_win_set_cursor(0, { end_row + 1, end_column })
  end
end

--- Fill every <FILL> of the buffer, each seeing those before it; without one, the gap at the cursor.
function M.fill()
  local before = snapshot()
  if not before then
    return
  end
  local pieces = text.pieces(before.text)
  if #pieces == 1 then
    local row, column = unpack(vim.api.nvim_win_get_cursor(0))
    local at = text.offset(before.text, row - 1) + column
    pieces = { before.text:sub(1, at), before.text:sub(at + 1) }
  end
  local from, to = #pieces[1], #before.text - #pieces[#pieces]
  local filled = pieces[1]

  local function fill_gap(number)
    local body = {
      model = options.model,
      input_prefix = text.tail(filled, options.before),
      input_suffix = text.head(pieces[number], options.after),
      n_predict = options.max_tokens,
    }
    http.post(options, "/infill", body, { "content" }, function(answer, reason)
      if not answer then
        return say(reason)
      end
      filled = filled .. answer
      if number == #pieces then
        return replace(before, from, to, filled:sub(from + 1))
      end
      filled = filled .. pieces[number]
      fill_gap(number + 1)
    end)
  end
  fill_gap(2)
end

--- Change the lines `first` to `last`, from 1; without an instruction mistakes are looked for.
function M.edit(first, last, instruction)
  local before = snapshot()
  if not before then
    return
  end
  local from = text.offset(before.text, first - 1)
  local region = table.concat(vim.api.nvim_buf_get_lines(before.buffer, first - 1, last, false), "\n")
  if #region > options.region then
    return say(("the lines have %d bytes; at most %d are sent: give fewer"):format(#region, options.region))
  end
  local to = from + #region
  local message, tag = text.edit_message(
    instruction,
    text.tail(before.text:sub(1, from), options.before),
    region,
    text.head(before.text:sub(to + 1), options.after)
  )
  if not message then
    return say(("the text holds %s, which is a tag of the request; remove it"):format(tag))
  end
  local body = { model = options.model, messages = { { role = "user", content = message } } }
  http.post(options, "/v1/edit/completions", body, { "choices", 1, "message", "content" }, function(new, reason)
    if not new then
      return say(reason)
    end
    if new == region then
      return say("nothing to change", vim.log.levels.INFO)
    end
    replace(before, from, to, new)
  end)
end

return M
